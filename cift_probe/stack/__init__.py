"""The code that builds the model, the trainer and the step of a plan; runs in a child process."""
