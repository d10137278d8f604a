"""Input side: datasets written by data_prep -> fixed-shape numeric examples for the phases."""
