"""The engine, its moment sources, containers and the writing of outputs."""
