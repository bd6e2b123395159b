"""A stage that the package does not have, to see that its folder and two lines in STAGES are all that it takes."""
