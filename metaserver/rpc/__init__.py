"""The meta server over gRPC: both sides, and their messages."""
