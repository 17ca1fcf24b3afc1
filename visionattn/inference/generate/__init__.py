"""Images that a pixel decoder writes value by value."""
