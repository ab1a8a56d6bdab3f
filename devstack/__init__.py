"""The whole stack on one machine without containers, and the command line around it."""
