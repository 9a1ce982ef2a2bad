"""What an answer is worth: verifiers, reward models, judges, rubrics, debates and programs as components of one reward."""
