"""A small continuous-batching engine over `PagePool` that runs Hugging Face decoders."""
