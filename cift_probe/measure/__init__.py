"""What happened when it was tried: instruments, and the bench that runs them."""
