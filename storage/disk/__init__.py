"""The disk tier: a log-structured block store on preallocated segment files."""
