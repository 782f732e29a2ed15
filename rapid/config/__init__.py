"""Settings: sections that methods share, and presets."""
