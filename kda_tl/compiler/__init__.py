"""Program to artifact. Needs TileLang; nothing that runs a model imports this."""
