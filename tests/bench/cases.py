"""The 50 scoring cases of reference/benchmark.md C: (number, type, prediction, gold, robust, official, debatable).

For true/false and multiple choice `robust` and `official` are scores 0/1, robust None means invalid (scored 0); for
fill_blank they are (EMatch, PMatch), for open (BLEU-1, ROUGE-L). DEBATABLE names robust expectations on which careful
people differ.
"""

O = ("Round", "Bilobed", "Kidney-shaped", "Multi-lobed")  # noqa: E741
H = ("Segmented nucleus", "Round nucleus", "Bilobed nucleus", "Hypersegmented nucleus")
P = ("2%", "12%", "14%", "67%")
N = ("Neutrophils", "Lymphocytes", "Monocytes", "Basophils")

CHOICE = [
    (1, (), "**False**", "False", 1, 1),
    (2, (), "The statement is true.", "True", 1, 0),
    (3, (), "This statement is false because the nucleus is round.", "False", 1, 0),
    (4, (), "Yes", "True", 1, 0),
    (5, (), "No, the nucleus is not bilobed.", "False", 1, 0),
    (6, (), "True or False: False", "True", 0, 1),
    (7, (), "true/false", "True", None, 1),
    (8, (), "Not true.", "False", 1, 0),
    (9, (), "True. The nucleus is not round, so a claim of normality would be false.", "True", 1, 1),
    (10, (), "", "False", None, 0),
    (11, (), "I cannot determine this from the image.", "False", None, 0),
    (12, (), "<think>It could be true.</think>False", "False", 1, 0),
    (13, O, "The answer is B.", "Bilobed", 1, 0),
    (14, O, "**B**", "Bilobed", 1, 0),
    (15, O, "B\n\nThe nucleus has two lobes.", "Bilobed", 1, 0),
    (16, O, "A. Round is wrong, the answer is B", "Bilobed", 1, 0),
    (17, O, "A: no; B: yes", "Round", None, 1),
    (18, O, "A, B", "Round", None, 0),
    (19, O, "A) Bilobed", "Round", None, 1),
    (20, O, "E", "Bilobed", None, 0),
    (21, O, "bilobed nucleus", "Bilobed", 1, 0),
    (22, H, "Hypersegmented nucleus", "Segmented nucleus", 0, 0),
    (23, H, "The nucleus is hypersegmented nucleus type", "Hypersegmented nucleus", 1, 0),
    (24, P, "2", "12%", None, 0),
    (25, P, "C", "14%", 1, 1),
    (26, N, "A neutrophil with three lobes: D", "Basophils", 1, 0),
    (27, N, "\uff22", "Lymphocytes", 1, 0),
    (28, N, "", "Neutrophils", None, 0),
]
FILL = [
    (29, "Normal morphology", "No", (0, 0), (0, 1)),
    (30, "The nucleus is surrounded by scant cytoplasm", "Round", (0, 0), (0, 1)),
    (31, "hypersegmented", "Segmented", (0, 0), (0, 1)),
    (32, "The nucleus is not bilobed", "Bilobed", (0, 0), (0, 1)),
    (33, "13-5", "3-5", (0, 0), (0, 1)),
    (34, "3 to 5 lobes", "3\u20135 lobes", (1, 1), (0, 0)),
    (35, "kidney_shaped", "Kidney-shaped", (1, 1), (0, 0)),
    (36, "Pelger-Huet anomaly", "Pelger-Hu\u00ebt anomaly", (1, 1), (0, 0)),
    (37, "Folate or vitamin B12 deficiency", "Vitamin B12 or folate deficiency", (0, 0), (0, 0)),
    (38, "Lymphocyte, monocyte, neutrophil, eosinophil, basophil", "Monocyte", (0, 0), (0, 1)),
    (39, "10\u2079/L", "109/L", (0, 0), (1, 1)),
    (40, "", "Round", (0, 0), (0, 0)),
    (41, "anything", "", (0, 0), (0, 1)),  # robust: an empty gold is refused at load
    (42, "The nucleus is Bilobed.", "Bilobed", (0, 1), (0, 1)),
    (43, "-5", "5", (0, 0), (1, 1)),
    (44, "The bilobed nucleus", "Bilobed nucleus", (0, 1), (0, 1)),
]
OPEN = [
    (45, "", "a b c", (0.0, 0.0)),
    (46, "a", "a b c", (0.1353352832366127, 0.5)),
    (47, "the the the", "the cat", (1 / 3, 0.4)),
    (48, "b a", "a b", (1.0, 0.5)),
    (49, "running cells", "run cell", (0.0, 0.0)),
    (50, "3-5 lobes", "3\u20135 lobes", (1.0, 1.0)),
]
DEBATABLE = {37: "order of a pair", 38: "an enumeration holds the answer", 44: "article kept in EMatch"}
