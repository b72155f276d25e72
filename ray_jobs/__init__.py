"""The execution of work. Only this package imports ray, never `pipeline`. Each file is one job."""
