"""The pool as a program uses it: Pool and AsyncPool over several nodes."""
