"""Public data sets by the names that papers use, read from local copies or from the Hub."""
