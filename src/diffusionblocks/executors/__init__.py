"""Where block jobs run. An executor decides the place and the order; the bits are the same from each."""
