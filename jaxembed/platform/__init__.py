"""The operating system, files and object stores."""
