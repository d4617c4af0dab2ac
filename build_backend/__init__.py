"""Build backend of the fork: turns a released wheel, our patches and our modules into wheels and sdists."""
