"""The table of bad inputs: command lines, files and variables that nobody should give, each with the line it prints."""
