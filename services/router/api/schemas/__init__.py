"""Bodies of requests and answers, and the errors for bodies that do not fit."""
