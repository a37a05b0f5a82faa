"""The quickstart: a shop-support agent that learns its tools, on two CPU cores."""
