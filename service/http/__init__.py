"""What goes over the wire: requests, options, answers and errors."""
