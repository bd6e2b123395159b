"""Every option of every command, stated once: name, type, default, help, group and check."""
