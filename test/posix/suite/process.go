package suite

// RunAsHelper is for the main function of a program that runs cases: it takes
// over, and ends the process, when a case started it as its second process.
func RunAsHelper() {}
