"""What the dashboard's pages and the report's have in common: numbers as shown, drawings, definitions, style, parts."""
