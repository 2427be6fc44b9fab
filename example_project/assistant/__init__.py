"""An example to copy: an assistant whose model calls and payments survive their worker."""
