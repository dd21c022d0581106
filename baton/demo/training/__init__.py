"""How the demo model was made: its texts and the script that trains on them. Not part of the wheel."""
