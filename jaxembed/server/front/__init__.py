"""Front-end processes, which read and answer HTTP for one engine process."""
