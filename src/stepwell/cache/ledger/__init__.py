"""Who decides: index, status, holds and budget of the host tier. Frames are integers here."""
