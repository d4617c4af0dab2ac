"""What the servers that ask for it are logged in to with."""

USER = "user"
SECRET = "correct-horse-battery-staple"
