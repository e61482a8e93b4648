"""Files that run a cluster under Kubernetes, compose or systemd (``tierkv deploy``)."""
