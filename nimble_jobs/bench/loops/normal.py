"""How pictures are normalised: by the mean and standard deviation of ImageNet, on values from 0 to 1."""

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
