"""Result files of every benchmark as one HTML page."""
