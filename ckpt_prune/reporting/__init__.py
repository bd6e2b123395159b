"""One page of HTML that shows what an output lost and kept, block by block."""
