package local

import (
	"testing"

	"penstock.io/penstock/test/disk"
)

// TestRoomOfAFullDisk: ext4's reserve is no room.
func TestRoomOfAFullDisk(t *testing.T) {
	for name, size := range map[string]int64{"small": 64 << 20, "middle": 512 << 20} {
		t.Run(name, func(t *testing.T) {
			d := disk.Temp(t, size)
			if free, total, err := room(d.At); err != nil || free == 0 || free > total {
				t.Fatalf("an empty disk has %d free of %d: %v", free, total, err)
			}
			const left = 1 << 20
			if _, err := d.Fill(left); err != nil {
				t.Fatal(err)
			}
			if free, _, err := room(d.At); err != nil || free > left+64<<10 {
				t.Errorf("a disk with %d bytes left has %d free: %v", left, free, err)
			}
		})
	}
}
