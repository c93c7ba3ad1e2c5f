"""The checks of the doctor, a file for each group."""
