package bench

// groups is the index of the workloads; a file for each.
func groups() []group {
	return []group{
		largeGroup(),
		checkpointGroup(),
		smallGroup(),
		imagesGroup(),
		entriesGroup(1),
		entriesGroup(8),
		listGroup(),
		appendGroup(),
		treeGroup(),
	}
}
