"""The command line: kda-tl. One command per file; nothing here needs TileLang but `build`, while it runs."""
