"""Keys, pages, frames and indexes: pure, without I/O, threads, clock or torch."""
