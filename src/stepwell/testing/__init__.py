"""Models and references that authors of engines and pools can test with."""
