"""The methods of papers and of the projects this one grew from, one file each, for comparison."""
