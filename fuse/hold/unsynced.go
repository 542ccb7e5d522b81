package hold

import (
	"os"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// Unsynced returns the number of files and bytes in a mount's memory that are not durable. A
// memory that no process can take over, since its maker was killed before completing it,
// counts as empty. Errors: Version (another version of penstock may read the memory), Corrupt.
func Unsynced(memory *os.File) (files int, bytes int64, err error) {
	left, err := keep.Left(int(memory.Fd()))
	switch {
	case meta.KindOf(err) == meta.Version:
		return 0, 0, err
	case err != nil:
		return 0, 0, nil
	}
	defer left.Close()
	records, err := left.Records()
	if err != nil {
		return 0, 0, err
	}
	type file struct{ a, b uint64 }
	seen := make(map[file]bool)
	for _, r := range records {
		switch r.Kind {
		case keep.Data:
			seen[file{r.N[0], r.N[1]}] = true
		case keep.Page:
			seen[file{r.N[0], 0}] = true
		default:
			continue
		}
		bytes += int64(r.N[3])
	}
	return len(seen), bytes, nil
}
