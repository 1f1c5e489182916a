package verbstest

var memoryTests []conformanceTest
