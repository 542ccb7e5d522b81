package penstock

// Stats takes a reading.
func (c *Client) Stats() Stats {
	s := Stats{
		Inodes:        c.table.len(),
		Dentries:      int(c.dentries.Load()),
		BufferBytes:   c.buf.inUse(),
		RPCs:          c.stats.rpcs.Load(),
		LookupHits:    c.stats.hits.Load(),
		Indexed:       c.stats.indexed.Load(),
		BadIndexes:    c.stats.refused.Load(),
		Recalls:       c.stats.recalls.Load(),
		Growths:       c.stats.growths.Load(),
		WrittenBytes:  c.stats.written.Load(),
		ReadBytes:     c.stats.read.Load(),
		AppendedBytes: c.stats.appended.Load(),
		Commits:       c.stats.commits.Load(),
		LostBytes:     c.stats.lost.Load(),
		LostFiles:     c.stats.lostFiles.Load(),
	}
	for _, v := range c.openVolumes() {
		u := v.Unsynced()
		s.DirtyBytes += u.Bytes
		s.DirtyFiles += u.Files
	}
	return s
}
