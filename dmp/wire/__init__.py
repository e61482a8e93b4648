"""The data plane on the wire: frames, messages, sockets."""
