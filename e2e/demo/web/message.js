export const message = "Hello from the repository";
