"""The public functions: check the inputs, plan, launch."""
