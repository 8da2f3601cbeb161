"""A run's configuration: values, options, and the registry of strategies. No torch."""
