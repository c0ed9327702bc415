"""The methods of papers, and of the projects from which this one grew, for comparison."""
