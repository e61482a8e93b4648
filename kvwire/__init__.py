"""Messages between processes: .proto files, generated code, conversion, status, channels."""
