"""Artifact to call: loader and dispatcher. Imports neither TileLang nor the compiler."""
