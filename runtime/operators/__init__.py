"""What ATen's operators are in JAX, and the machinery that runs them.

Loaded with the first tensor on the device, which needs JAX anyway: files here import it at their
top, and nothing else imports them at its own.
"""
