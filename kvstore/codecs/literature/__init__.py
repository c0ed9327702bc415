"""Methods of papers, and of the projects from which this one grew (``seeds``), for comparison."""
