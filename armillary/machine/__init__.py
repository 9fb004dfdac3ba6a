"""What this computer is: cores, memory and their limits, devices and their names. Never imports torch."""
