"""Bodies of requests and answers, and how a body that does not fit is told to its sender."""
